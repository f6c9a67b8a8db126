"""The process in which sandboxed code runs. Only the standard library: it is started without site-packages."""
