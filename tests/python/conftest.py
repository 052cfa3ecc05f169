"""What all tests of the package share."""

import pathlib

import pytest


@pytest.fixture(scope="session")
def root():
    """The repository, which holds the data."""
    return pathlib.Path(__file__).resolve().parents[2]
