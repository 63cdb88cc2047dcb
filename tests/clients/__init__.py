"""The ordinary examples of OpenAI's clients, run with the real packages: `make test-clients`."""
