"""Recorders that wrap a rank's ring buffer record in it what they do not override, and map no memory."""

from __future__ import annotations

import inspect
import mmap
from unittest import mock

import pytest

from meshwright.flight_recorder.call_ring import CallWriter
from meshwright.flight_recorder.device_calls import DeviceCalls
from meshwright.flight_recorder.wrapped_calls import WrappedCalls
from meshwright.monitoring.timed_calls import CallTimer
from meshwright.training.cuda_graphs import _CapturedCalls


def test_wrapped_recorder_has_all_methods_of_the_ring_buffer():
    methods = {name: each for name, each in inspect.getmembers(CallWriter, inspect.isfunction) if name[0] != "_"}
    assert len(methods) >= 8
    for name, method in methods.items():
        wrapped = inspect.signature(getattr(WrappedCalls, name))
        assert wrapped.parameters.keys() == inspect.signature(method).parameters.keys(), name


def test_calls_reach_the_ring_buffer_through_several_recorders():
    writer = CallWriter()
    calls = CallTimer(WrappedCalls(writer))
    group = calls.register_group((0, 1), purpose="reductions")
    with calls.post_together():
        numbers = [calls.post(group, site, "all_reduce", "dp", 8, "f", (2,)) for site in ("a", "b")]
    calls.wait(numbers[0])
    calls.done(numbers[0])
    calls.give_up()
    seen = writer.read()
    assert [call.site for call in seen.calls] == ["a", "b"] and len({call.posted for call in seen.calls}) == 1
    assert [call.done is not None for call in seen.calls] == [True, False] and seen.gave_up
    assert calls.count_calls(group) == 2 and calls.read() == seen


@pytest.mark.parametrize("kind", [_CapturedCalls, CallTimer, DeviceCalls])
def test_wrapping_a_recorder_maps_no_memory(kind: type[WrappedCalls]):
    writer = CallWriter()
    more = () if kind is not DeviceCalls else (mock.Mock(), 1.0, mock.Mock())
    with mock.patch.object(mmap, "mmap", side_effect=AssertionError("a second ring buffer")):
        kind(writer, *more)
