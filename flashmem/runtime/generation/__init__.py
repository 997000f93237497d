"""Text generation by a bundle of a language model: tokenizer, sampling, and the generator over a session."""
