"""Options of the test run."""

import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the golden reports of the fixture logs anew instead of comparing them",
    )


@pytest.fixture
def update_golden(request):
    return request.config.getoption("--update-golden")
