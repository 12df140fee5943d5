"""Messages between the processes of a server, over a connection."""

from __future__ import annotations

import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from meshwright.errors import RankLost
from meshwright.serving.messages import Channel, Listener, encode


def connect_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


def test_message_is_received_whole_although_a_signal_interrupts_its_arrival():
    ours, theirs = connect_pair()
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


def test_listener_accepts_only_who_proves_to_know_the_secret():
    listener = Listener("127.0.0.1", "secret")
    host, port = listener.address.split(":")
    with ThreadPoolExecutor(1) as thread, socket.create_connection((host, int(port))) as stranger:
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
    ours, theirs = connect_pair()
    channel, sent = Channel(ours), [{"number": number} for number in range(3)]
    assert channel.receive_ready(wait=False) == []
    theirs.sendall(b"".join(map(encode, sent)))
    assert channel.receive_ready(wait=True) == sent
    theirs.sendall(encode({"cut": "off"})[:9])
    theirs.close()
    with pytest.raises(RankLost, match="closed the connection"):
        channel.receive()
    channel.close()
