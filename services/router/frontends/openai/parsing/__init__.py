"""Parts of requests, as engines and templates know them."""
