"""`penstock view --export`: runs in one HTML file."""
