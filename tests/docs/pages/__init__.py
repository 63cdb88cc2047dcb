"""Which blocks of which page are run, and why others are not."""

from tests.docs.pages import begin, examples, operation, reward, rollouts, training

PAGES = (*begin.PAGES, *training.PAGES, *rollouts.PAGES, *reward.PAGES, *operation.PAGES, *examples.PAGES)
