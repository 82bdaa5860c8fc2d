"""Weights from a sender to receivers, without models: buckets, checksums, channels, failures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlx.core.engine.interfaces import WeightsLink
from rlx.core.engine.transfer import receiver as receiver_module
from rlx.core.engine.transfer import sender as sender_module
from rlx.core.engine.transfer.buckets import Contents, Filling, opened
from rlx.core.engine.transfer.errors import LearnerLostError, TransferError
from rlx.core.engine.transfer.place import here, remove_left, shared_memory_root
from rlx.core.engine.transfer.receiver import Receiver
from rlx.core.engine.transfer.sender import Sender, remove_stale

CHANNELS = ["shared_memory", "gloo"]
KIB = 1024
Tensors = dict[str, torch.Tensor]


class Source:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def metadata(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        return [(name, tensor.dtype, tensor.shape) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())


def tensors(seed: int = 0) -> Tensors:
    """All dtypes of weights, no element, one element, a transposed one, one above the bucket."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "embedding": random(300, 33),
        "scalar": random(),
        "empty": random(0, 4),
        "transposed": random(7, 5).T,
        **{f"layers.{n}.half": random(41, 13).bfloat16() for n in range(20)},
        "double": random(3).double(),
        "counts": torch.arange(9),
        "flags": torch.tensor([True, False, True]),
    }


def make_sender(transport: str, *, receivers: int = 1, bucket: int = 4 * KIB) -> Sender:
    return Sender(transport=transport, receivers=receivers, bucket=bucket)


def send(sender: Sender, source: Any, version: int = 1, *, base: int | None = None) -> Any:
    sender.offer(version, base)
    return sender.send(source, version)


def link_of(sender: Sender) -> WeightsLink:
    return sender._link


def take(receiver: Receiver, number: int = 0, *, complete: bool = True) -> Tensors:
    found: Tensors = {}
    for bucket in receiver.buckets(number, complete=complete):
        assert not found.keys() & bucket.keys()
        found.update({name: tensor.clone() for name, tensor in bucket.items()})
    return found


def same(found: Tensors, sent: Tensors) -> bool:
    return found.keys() == sent.keys() and all(
        found[name].dtype == sent[name].dtype and torch.equal(found[name], sent[name])
        for name in sent
    )


@contextmanager
def threads(count: int) -> Iterator[Callable[..., Future[Any]]]:
    with ThreadPoolExecutor(count) as pool:
        yield pool.submit


@pytest.mark.parametrize("transport", CHANNELS)
def test_every_receiver_gets_every_publication_whole(transport: str) -> None:
    sender = make_sender(transport, receivers=3)
    with threads(3) as run:
        receivers = [run(Receiver, link_of(sender)) for _ in range(3)]
        for version in range(3):
            sent = tensors(version)
            taking = [run(take, receiver.result(), version) for receiver in receivers]
            report = send(sender, Source(sent), version)
            assert report.version == version
            assert report.bytes == sum(tensor.nbytes for tensor in sent.values())
            assert all(same(item.result(), sent) for item in taking)
            assert {receiver.result().received.checksum for receiver in receivers} == {
                report.checksum
            }
    sender.close()


def test_checksum_changes_with_names_shapes_and_one_bit() -> None:
    plain = {"a": torch.zeros(4, 2), "b": torch.zeros(3)}
    others = [
        {"b": plain["b"], "a": plain["a"]},
        {"a": plain["a"], "c": plain["b"]},
        {"a": plain["a"].T, "b": plain["b"]},
        {"a": plain["a"], "b": plain["b"].view(torch.int32)},
        {"a": plain["a"], "b": torch.tensor([0.0, -0.0, 0.0])},
    ]
    found = []
    for weights in [plain, *others]:
        sender = make_sender("shared_memory")
        with threads(1) as run:
            taking = run(take, Receiver(link_of(sender)))
            found.append(send(sender, Source(weights)).checksum)
            taking.result()
        sender.close()
    assert found[0] == found[1], "the order of the tensors does not matter"
    assert len(set(found)) == len(found) - 1


def test_memory_is_one_file_that_every_publication_uses() -> None:
    root = shared_memory_root()
    sender = make_sender("shared_memory", bucket=64 * KIB)
    weights = {f"layers.{n}": torch.randn(64, 64) for n in range(40)}  # 16 KiB each
    buckets: list[int] = []

    def count(receiver: Receiver, number: int) -> None:
        for bucket in receiver.buckets(number, complete=False):
            (storage,) = {item.untyped_storage().nbytes() for item in bucket.values()}
            assert storage == 40 * 16 * KIB
            buckets.append(len(bucket))

    with threads(1) as run:
        receiver = Receiver(link_of(sender))
        for number in range(3):
            taking = run(count, receiver, number)
            send(sender, Source(weights), number)
            taking.result()
    assert buckets == [4] * 30
    (file,) = root.glob(f"rlx-buckets-*-{link_of(sender).key}")
    assert file.stat().st_size == 40 * 16 * KIB
    remove_left(link_of(sender).key)
    assert not file.exists()
    sender.close()


def test_a_later_receiver_finds_all_weights_of_the_last_publication() -> None:
    """Also those that it left out: an engine that is started anew has none of them."""
    sender = make_sender("shared_memory")
    first, part = tensors(1), {"counts": torch.arange(9) + 5, "embedding": torch.ones(300, 33)}
    with threads(1) as run:
        receiver = Receiver(link_of(sender))
        for number, weights in enumerate([first, part]):
            taking = run(take, receiver, number, complete=number == 0)
            send(sender, Source(weights), number, base=number - 1)
            assert same(taking.result(), weights)
        late = Receiver(link_of(sender))
        assert same(take(late, 1, complete=True), {**first, **part})
        assert late.received.checksum == receiver.received.checksum
        taking = [run(take, late, 2), run(take, receiver, 2)]
        send(sender, Source(tensors(3)), 3)
        assert all(same(item.result(), tensors(3)) for item in taking)


def test_over_tcp_a_later_receiver_is_told_that_it_comes_too_late() -> None:
    sender = make_sender("gloo")
    with threads(1) as run:
        taking = run(take, Receiver(link_of(sender)))
        send(sender, Source(tensors()))
        taking.result()
        with pytest.raises(LearnerLostError, match="started anew comes too late"):
            take(Receiver(link_of(sender)))


def test_the_first_publication_holds_all_weights() -> None:
    sender = make_sender("auto")
    assert [sender.offer(7, base).base for base in (6, 6, None)] == [None, 6, None]


def test_what_a_killed_run_left_in_shared_memory_is_removed(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stale, own = tmp_path / f"rlx-buckets-{dead.pid}-a", tmp_path / f"rlx-buckets-{os.getpid()}-b"
    stale.touch()
    own.touch()
    remove_stale(tmp_path)
    assert list(tmp_path.iterdir()) == [own]


def test_a_changed_bit_is_noticed() -> None:
    bucket = Filling(space=torch.zeros(KIB, dtype=torch.uint8), limit=KIB)
    bucket.add("a", torch.randn(10))
    bucket.add("b", torch.randn(10))
    contents = Contents.decoded(bucket.contents(last=True).encoded().encode())
    assert opened(bucket.space, contents).keys() == {"a", "b"}
    bucket.space[contents.items[1].start + 3] ^= 1
    with pytest.raises(TransferError, match="b arrived with checksum"):
        opened(bucket.space, contents)


@pytest.mark.parametrize("transport", CHANNELS)
def test_an_error_of_the_source_reaches_the_receivers(transport: str) -> None:
    class Broken(Source):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for number, item in enumerate(super().__iter__()):
                if number == 15:
                    raise ValueError("out of memory, say")
                yield item

    sender = make_sender(transport, receivers=2)
    with threads(2) as run:
        receivers = [run(Receiver, link_of(sender)) for _ in range(2)]
        taking = [run(take, receiver.result()) for receiver in receivers]
        with pytest.raises(ValueError, match="out of memory"):
            send(sender, Broken(tensors()))
        for item in taking:
            with pytest.raises(TransferError, match="the learner gave up: out of memory, say"):
                item.result(timeout=20)


def test_a_sender_whose_receiver_does_not_go_on_can_be_aborted() -> None:
    sender = make_sender("gloo", receivers=2)
    with threads(3) as run:
        receivers = [run(Receiver, link_of(sender)) for _ in range(2)]
        good, bad = (receiver.result() for receiver in receivers)
        taking = run(take, good)
        stalled = bad.buckets(0, complete=True)
        first = run(next, stalled)
        weights = {f"layers.{n}": torch.randn(32, 32) for n in range(9)}  # a bucket each
        sending = run(send, sender, Source(weights))
        first.result()
        time.sleep(0.2)
        assert not sending.done()
        stalled.close()
        sender.abort()
        with pytest.raises(TransferError, match="given up"):
            sending.result(timeout=20)
        with pytest.raises(TransferError, match=r"gave up|did not get through|is gone"):
            taking.result(timeout=20)


CHILD = """
import sys, time
from test_transfer import Source, make_sender, send, tensors, link_of

class Slow(Source):
    def __iter__(self):
        for number, item in enumerate(super().__iter__()):
            if number == 15:
                print("some", flush=True)
                time.sleep(60)
            yield item

sender = make_sender(sys.argv[1])
print(link_of(sender).port, flush=True)
send(sender, Slow(tensors()))
"""


@contextmanager
def child(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("transport", CHANNELS)
def test_a_killed_sender_is_noticed_at_once(transport: str) -> None:
    with child(transport) as process, threads(1) as run:
        assert process.stdout is not None
        link = replace(link_of(make_sender(transport)), port=int(process.stdout.readline()))
        taking = run(take, Receiver(link))
        assert process.stdout.readline() == "some\n"
        process.kill()
        with pytest.raises(TransferError, match=r"is gone|did not get through"):
            taking.result(timeout=20)


def test_shared_memory_of_another_host_is_refused_and_auto_takes_gloo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    away = replace(here(), memory="another host")
    monkeypatch.setattr(receiver_module, "here", lambda: away)
    with threads(1) as run:
        sender = make_sender("shared_memory")
        taking = run(take, Receiver(link_of(sender)))
        with pytest.raises(TransferError, match=r"use publication\.transport: gloo"):
            send(sender, Source(tensors()))
        with pytest.raises(TransferError, match="do not see the shared memory"):
            taking.result()
        sender = make_sender("auto")
        taking = run(take, Receiver(link_of(sender)))
        send(sender, Source(tensors()))
        assert same(taking.result(), tensors())
        assert isinstance(sender._channel, sender_module.Gloo)


def test_a_full_shared_memory_is_an_error_and_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    sender = make_sender("shared_memory")
    with threads(1) as run:
        taking = run(take, Receiver(link_of(sender)))
        with pytest.raises(TransferError, match=r"no room for \d+ bytes"):
            send(sender, Source(tensors()))
        with pytest.raises(TransferError, match="no room"):
            taking.result()


def test_buckets_are_read_while_others_are_filled() -> None:
    sender = make_sender("shared_memory", bucket=KIB)
    weights = {f"layers.{n}": torch.randn(16, 16) for n in range(6)}  # a bucket each
    read = threading.Event()

    class Watched(Source):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in super().__iter__():
                assert name != "layers.5" or read.wait(20)
                yield name, tensor

    def first(receiver: Receiver) -> None:
        for _ in receiver.buckets(0, complete=False):
            read.set()

    with threads(1) as run:
        taking = run(first, Receiver(link_of(sender)))
        send(sender, Watched(weights))
        taking.result()
