"""What `penstock doctor` looks at: each check is a function of what a machine shows, and returns what it found."""
