import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch has no distributed", allow_module_level=True)

from cases.ranks import Ranks  # noqa: E402


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Four processes, of which a test takes the first ones."""
    made = Ranks(4, tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


@pytest.fixture
def fresh_ranks(tmp_path):
    """Two processes that a test may end, with a timeout of 4 seconds."""
    made = Ranks(2, tmp_path, timeout=4)
    yield made
    made.close()
