"""`penstock runs`: lists runs and deletes them."""
