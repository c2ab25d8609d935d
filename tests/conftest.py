"""For all tests."""

from hypothesis import settings

# `pytest --hypothesis-profile=thorough`: for tests that take their number of examples from the profile.
settings.register_profile("thorough", max_examples=1000, deadline=None)
