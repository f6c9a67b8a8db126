"""What holds for all tests."""

from hypothesis import settings

settings.register_profile("any machine", deadline=None)  # no test depends on how fast the machine is
settings.load_profile("any machine")
