"""One folder per operator of the graph; `plugins.core` is the language they share with builder and runtime."""
