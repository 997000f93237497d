"""An HTTP server for a language model, with the interface of OpenAI's API (https://platform.openai.com/docs/api-reference)."""
