"""The mathematics of the algorithms: advantages, returns, KL, losses and their aggregation, as pure functions."""
