"""Options of the test run."""

import os

import pytest
from hypothesis import settings

# The same examples in every run of CI, so that a red run is the change's own; new ones at a desk and with
# MEMLEDGER_EXAMPLES=2000 many of them.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("desk", deadline=None, max_examples=int(os.environ.get("MEMLEDGER_EXAMPLES", "100")))
settings.load_profile("ci" if os.environ.get("CI") else "desk")


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Tests keep their compiled rules in a folder of their own, never in the user's cache, and know no defaults of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMLEDGER_CONFIG", "")
        patch.setenv("MEMLEDGER_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the golden reports of the fixture logs anew instead of comparing them",
    )


@pytest.fixture
def update_golden(request):
    return request.config.getoption("--update-golden")
