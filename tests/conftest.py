"""For all tests."""


def pytest_collection_modifyitems(items):
    """The longest single test begins early, so that it is not what all wait for at the end."""
    items.sort(key=lambda item: "test_ops_triton.py" not in item.nodeid)
