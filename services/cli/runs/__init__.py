"""Commands about runs that exist: `penstock runs`, `status`, `scale`, `export`, `view`."""
