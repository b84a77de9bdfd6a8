"""Known defects are counted where tests mark them."""

from bench import defects

MARKED = '''
import pytest

@pytest.mark.xfail(strict=True, reason="it stalls")
def test_a(): ...

@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.xfail(strict=True))])
def test_b(n):
    """Says xfail, and is none."""
    if n > 9:
        pytest.xfail("later")
'''


def test_marks_are_found(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text(MARKED)
    assert defects.known(tmp_path / "tests") == ["tests/test_x.py:4", "tests/test_x.py:7", "tests/test_x.py:11"]
