"""Shows a run's folder in a browser: readers of its files, a server on loopback, a page without a framework."""
