"""Options of the test run."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Tests keep their compiled rules in a folder of their own, never in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
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
