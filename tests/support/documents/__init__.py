"""The code blocks of the documents, and what is wrong with them."""
