"""Model families: tokens, chat templates, images and the model folder."""
