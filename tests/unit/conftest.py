from pathlib import Path

import pytest

from megatron_dynmo import patching


@pytest.fixture
def toy_path(monkeypatch):
    """Make the toy package importable; forget it afterwards."""
    from tests.unit.toy_patches import forget_toys

    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    forget_toys()
    yield
    forget_toys()
    assert patching.active() is None


@pytest.fixture
def toy(toy_path):
    """The module of a user of the toy package, freshly imported."""
    import toy_package.caller
    import toy_user

    assert toy_package.caller.advance is toy_user.step
    return toy_user
