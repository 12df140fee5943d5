"""Messages between the processes of a server, over a socket pair, a Unix socket and TCP."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import uvloop

from meshwright.errors import RankLost
from meshwright.serving import messages
from meshwright.serving.messages import Channel, Listener, encode


def test_message_is_received_whole_although_a_signal_interrupts_its_arrival():
    ours, theirs = socket.socketpair()
    channel, message = Channel(ours), {"add": "x" * 1000}
    before = signal.signal(signal.SIGUSR1, lambda *_: None)

    def send() -> None:
        data = encode(message)
        theirs.sendall(data[:500])
        time.sleep(0.2)  # the receiver has read the first half and waits
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        time.sleep(0.2)
        theirs.sendall(data[500:])

    sender = threading.Thread(target=send)
    sender.start()
    try:
        assert channel.receive() == message
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)
        channel._socket.close()
        theirs.close()


def connect(address: str) -> socket.socket:
    """A socket connected to a listener's address, which proves nothing."""
    kind, place = address.split(":", 1)
    if kind == "tcp":
        host, port = place.split(":")
        return socket.create_connection((host, int(port)))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"\0{place}")
    return connection


@pytest.mark.parametrize(("host", "prefix"), [("", "unix:"), ("127.0.0.1", "tcp:127.0.0.1:")])
def test_listener_accepts_only_who_proves_to_know_the_secret(host: str, prefix: str):
    listener = Listener(host, "secret")
    assert listener.address.startswith(prefix)
    with ThreadPoolExecutor(1) as thread, connect(listener.address) as stranger:
        stranger.sendall(bytes(32))
        connecting = thread.submit(Channel.connect, listener.address, "secret")
        accepted = listener.accept(10.0)
        listener.close()  # ends a connection that was not accepted
        rank = connecting.result()
        rank.send(encode({"from": "rank"}))
        assert accepted.receive() == {"from": "rank"} and rank.own_address == host
        stranger.settimeout(10.0)
        assert len(stranger.recv(32)) == 32 and stranger.recv(1) == b""  # the listener's random bytes, then the end
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RankLost, match="nothing listens") as refused:
        Channel.connect(listener.address, "secret")
    assert len(os.listdir("/proc/self/fd")) == opened, refused  # whose traceback would keep the socket open
    accepted._socket.close()
    rank._socket.close()


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_silent_stranger_delays_a_rank_only_by_the_limit_of_a_proof(host: str, monkeypatch: pytest.MonkeyPatch):
    """Abstract names of Unix sockets are readable by all (/proc/net/unix): any process may connect and say nothing."""
    assert messages.PROOF_SECONDS <= 5.0
    monkeypatch.setattr(messages, "PROOF_SECONDS", 0.2)
    listener = Listener(host, "secret")
    with ThreadPoolExecutor(1) as thread, connect(listener.address) as first, connect(listener.address) as second:
        connecting, began = thread.submit(Channel.connect, listener.address, "secret"), time.monotonic()
        accepted, seconds = listener.accept(60.0), time.monotonic() - began
        assert 0.4 <= seconds < 10.0
        rank = connecting.result()
        for stranger in (first, second):  # the nonce, and then the end
            stranger.settimeout(10.0)
            assert len(stranger.recv(32)) == 32 and stranger.recv(1) == b""
    for each in (accepted, rank, listener):
        each._socket.close()


@pytest.mark.parametrize("start", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_connection_of_another_user_is_closed_even_if_it_knows_the_secret(
    start: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
):
    """The kernel attests the user of a Unix socket's peer; here the listener believes to have another one."""
    served = list[bool]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(True)

    def try_secret(address: str) -> None:
        channel = Channel.connect(address, "secret")
        try:
            channel.receive()
        finally:
            channel._socket.close()

    async def serve() -> None:
        server = await (listener := Listener("", "secret")).serve(answer)
        for user in (os.geteuid(), os.geteuid() + 1):
            monkeypatch.setattr(messages.os, "geteuid", lambda user=user: user)
            with pytest.raises(RankLost, match="closed the connection"):
                await asyncio.to_thread(try_secret, listener.address)
            assert served == [True]
        server.close()

    user = os.geteuid()
    with asyncio.Runner(loop_factory=start) as runner:
        runner.run(serve())
    monkeypatch.setattr(messages.os, "geteuid", lambda: user + 1)
    listener = Listener("", "secret")
    with ThreadPoolExecutor(1) as thread:
        trying = thread.submit(try_secret, listener.address)
        with pytest.raises(RankLost, match="no rank connected"):
            listener.accept(0.5)
        with pytest.raises(RankLost, match="closed the connection"):
            trying.result()
    listener.close()


def test_machine_called_unix_is_reached_over_tcp(monkeypatch: pytest.MonkeyPatch):
    asked = list[tuple[str, int]]()

    def refuse(place: tuple[str, int], timeout: float) -> socket.socket:
        asked.append(place)
        raise ConnectionRefusedError

    monkeypatch.setattr(messages.socket, "create_connection", refuse)
    with pytest.raises(RankLost, match="nothing listens at tcp:unix:9: "):
        Channel.connect("tcp:unix:9", "secret")
    assert asked == [("unix", 9)]


def test_all_arrived_messages_are_received_in_order_and_a_closed_connection_is_a_lost_rank():
    ours, theirs = socket.socketpair()
    channel, sent = Channel(ours), [{"number": number} for number in range(3)]
    assert channel.receive_ready(wait=False) == []
    theirs.sendall(b"".join(map(encode, sent)))
    assert channel.receive_ready(wait=True) == sent
    theirs.sendall(encode({"cut": "off"})[:9])
    theirs.close()
    with pytest.raises(RankLost, match="closed the connection"):
        channel.receive()
    channel._socket.close()
