"""`penstock view`: shows runs in a browser, from the files in their folders, while they go on or afterwards."""
