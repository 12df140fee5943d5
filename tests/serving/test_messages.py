"""Messages between the processes of a server, over a socket pair, a Unix socket and TCP."""

from __future__ import annotations

import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from meshwright.errors import RankLost
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
        channel.close()
        theirs.close()


def connect(address: str) -> socket.socket:
    """A socket connected to a listener's address, which proves nothing."""
    host, port = address.split(":")
    if host != "unix":
        return socket.create_connection((host, int(port)))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"\0{port}")
    return connection


@pytest.mark.parametrize(("host", "kind"), [("", "unix"), ("127.0.0.1", "127.0.0.1")])
def test_listener_accepts_only_who_proves_to_know_the_secret(host: str, kind: str):
    listener = Listener(host, "secret")
    assert listener.address.startswith(f"{kind}:")
    with ThreadPoolExecutor(1) as thread, connect(listener.address) as stranger:
        stranger.sendall(bytes(32))
        connecting = thread.submit(Channel.connect, listener.address, "secret")
        accepted = listener.accept(10.0)
        listener.close()  # ends a connection that was not accepted
        rank = connecting.result()
        rank.send(encode({"from": "rank"}))
        assert accepted.receive() == {"from": "rank"} and rank.own_address == host
        assert len(stranger.recv(100, socket.MSG_WAITALL)) == 32  # the listener's random bytes, then the end
    with pytest.raises(RankLost, match="nothing listens"):
        Channel.connect(listener.address, "secret")
    accepted.close()
    rank.close()


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
    channel.close()
