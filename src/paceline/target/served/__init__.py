"""The target behind HTTP: any server that speaks OpenAI's API, several of them at once."""
