"""For all tests."""

from hypothesis import settings

# No property is about time, and a deadline would fail on a slow or a busy machine.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")
# `pytest --hypothesis-profile=thorough`: for tests that take their number of examples from the profile.
settings.register_profile("thorough", max_examples=1000, deadline=None)
