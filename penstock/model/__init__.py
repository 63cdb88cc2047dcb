"""One model family in one place: tokens, chat template, images, the model's folder."""
