"""Where rows come from: files, folders, the Hub."""
