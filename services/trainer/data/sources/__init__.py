"""Sources of rows: files, folders, the Hub."""
