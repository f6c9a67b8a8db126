"""Workers: how they start, meet, keep what they did, and end."""

RESUME = "DISTFLOW_RESUME"  # in the environment of workers: where to go on from, a path or one of these
NEWEST = "newest"  # the newest whole checkpoint of the run
IF_ANY = "1"  # the same, but begin anew where there is none
