import pytest
import torch

from mainstay_core.base.errors import InvalidSpecError
from mainstay_train.exact import draws
from mainstay_train.model import data
from mainstay_train.sums import digests


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"second file " * 20)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.md").write_bytes(b"first file " * 20)
    (tmp_path / "image.bin").write_bytes(b"\0\1\2" * 50)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "x.txt").write_bytes(b"never")
    return tmp_path


def _dataset(path):
    data.load_corpus.cache_clear()
    return data.ByteDataset(str(path), sequence=16, micro_batch_size=3)


def test_text_files_are_read_in_the_order_of_their_names(folder):
    corpus = _dataset(folder).corpus
    assert bytes(corpus.data.tolist()) == b"first file " * 20 + b"second file " * 20


def test_ignored_targets_do_not_count_as_tokens():
    targets = torch.tensor([[1, -100, 2, -100]])
    assert data.num_tokens(data.Batch(targets, targets)) == 2


def test_a_batch_is_a_function_of_its_address_and_targets_follow_tokens(folder):
    dataset = _dataset(folder)
    address = draws.Address(1, 2, 3, 4)
    batch = dataset.batch(address)
    again = _dataset(folder).batch(draws.Address(1, 2, 3, 4))
    assert batch.tokens.shape == batch.targets.shape == (3, 16)
    assert batch.tokens.dtype == torch.int64
    assert torch.equal(batch.tokens, again.tokens)
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    text = bytes(dataset.corpus.data.tolist())
    for row, target in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        assert bytes([*row, target[-1]]) in text
    others = [draws.Address(0, 2, 3, 4), draws.Address(1, 2, 3, 5), draws.Address(1, 2, 4, 4)]
    assert all(not torch.equal(batch.tokens, dataset.batch(o).tokens) for o in others)


def test_every_start_can_be_drawn(tmp_path):
    (tmp_path / "t").write_bytes(b"0123456789")
    dataset = data.ByteDataset(str(tmp_path), sequence=7, micro_batch_size=64)
    starts = {int(row[0]) - 48 for row in dataset.batch(draws.Address(0, 0, 0, 0)).tokens}
    assert starts == {0, 1, 2}


def test_the_fingerprint_tells_other_bytes_names_and_shapes_apart(folder):
    first = _dataset(folder).fingerprint()
    assert _dataset(folder).fingerprint() == first
    assert data.ByteDataset(str(folder), sequence=8, micro_batch_size=3).fingerprint() != first
    (folder / "b.txt").write_bytes(b"Second file " * 20)
    changed = _dataset(folder).fingerprint()
    assert changed != first
    (folder / "b.txt").rename(folder / "c.txt")
    assert _dataset(folder).fingerprint() not in (first, changed)


def test_consumed_digests_tell_which_samples_were_used(folder):
    dataset = _dataset(folder)
    addresses = [draws.Address(0, 0, t, m) for t in range(3) for m in range(2)]
    found = {data.consumed_digest(a, dataset.batch(a)).hex() for a in addresses}
    assert len(found) == len(addresses)


@pytest.mark.parametrize("types", [(torch.int64, torch.int64), (torch.int32, torch.int64)])
def test_the_digest_of_a_batch_is_that_of_its_tokens_and_of_targets_behind_them(types):
    address = draws.Address(1, 2, 3, 4)
    tokens, targets = (torch.randint(0, 300, (3, 16)).to(kind) for kind in types)
    name = "data:2/3/4"
    apart = digests.tensor_digest(name, tokens)
    apart += digests.tensor_digest(name, targets, offset=tokens.numel())
    assert data.consumed_digest(address, data.Batch(tokens, targets)) == apart


def test_the_standard_library_is_text_on_every_machine():
    corpus = data.load_corpus(data.STDLIB)
    assert corpus.data.numel() > 1_000_000


def test_files_are_sorted_by_their_whole_names_and_what_is_left_out_is_not_read(tmp_path):
    for name in (
        "a/b.py",
        "a.py",
        "a-b.py",
        "tests/c.py",
        "x/site-packages/d.py",
        "e.txt",
        ".f.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"text")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "g.py").symlink_to(tmp_path / "e.txt")

    def names(stdlib):
        found = data._text_files(tmp_path, stdlib=stdlib)
        return [file.relative_to(tmp_path).as_posix() for file in found]

    own = ["a-b.py", "a.py", "a/b.py", "g.py"]
    assert names(stdlib=True) == own
    assert names(stdlib=False) == sorted([*own, "e.txt", "tests/c.py", "x/site-packages/d.py"])


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InvalidSpecError, match=r"config\.data\.path: .*nowhere.* does not exist"):
        _dataset(tmp_path / "nowhere")
    with pytest.raises(InvalidSpecError, match="no text file"):
        _dataset(tmp_path)
    (tmp_path / "t").write_bytes(b"short")
    with pytest.raises(InvalidSpecError, match="holds 5 bytes of text, one sample needs 17"):
        _dataset(tmp_path)
