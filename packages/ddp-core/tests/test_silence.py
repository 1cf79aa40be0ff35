"""What silence means, with real sockets and a scheduler of nothing but workers' last words."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from test_knock import mute_server

from ddp_core._gang import Agent, Job
from ddp_core._knock import PROCESS_IS_GONE
from ddp_core._silence import MUTE_S, SILENCE_S, STOOD_STILL_S, Silence


def agent(port: int, silent_s: float) -> Agent:
    """An agent that last spoke so long ago."""
    one = Agent(f"tcp://127.0.0.1:{port}", "127.0.0.1", "key", [0])
    one.joined, one.heard = True, time.monotonic() - silent_s
    return one


async def verdict(silence: Silence, one: Agent) -> str:
    """What is thought of an agent after it was knocked at."""
    silence.why_lost(one)
    await asyncio.sleep(0.2)
    return silence.why_lost(one)


def judge(one: Agent, **workers: Any) -> tuple[str, list[str]]:
    async def run() -> tuple[str, list[str]]:
        silence = Silence(SimpleNamespace(workers=workers))
        why = await verdict(silence, one)
        told = silence.told(Job("job", 0, "client", "name", [one]))
        silence.close()
        return why, told

    return asyncio.run(run())


def test_who_has_just_spoken_is_not_silent() -> None:
    assert judge(agent(1, SILENCE_S - 2)) == ("", [])


def test_a_silent_worker_whose_host_answers_is_kept_and_its_owner_told() -> None:
    with mute_server("127.0.0.1") as port:
        why, (told,) = judge(agent(port, SILENCE_S + 8))
    assert not why
    assert f"worker tcp://127.0.0.1:{port} has said nothing for 20 s, but its host answers" in told


def test_a_silent_worker_whose_process_has_ended_is_lost() -> None:
    with mute_server("127.0.0.1") as port:
        pass
    why, told = judge(agent(port, SILENCE_S + 1))
    assert why.endswith(PROCESS_IS_GONE)
    assert not told


def test_a_worker_that_is_silent_for_very_long_is_lost_all_the_same() -> None:
    with mute_server("127.0.0.1") as port:
        assert "interpreter's lock" in judge(agent(port, MUTE_S + 1))[0]


def test_what_was_said_while_the_scheduler_stood_still_counts() -> None:
    async def run() -> str:
        silence = Silence(SimpleNamespace(workers={}))
        asyncio.get_running_loop().call_soon(time.sleep, STOOD_STILL_S + 0.5)
        await silence.sleep(0.1)
        return await verdict(silence, agent(1, MUTE_S + 1))

    assert asyncio.run(run()) == ""


def test_a_worker_whose_agent_has_not_begun_is_judged_by_its_heartbeats() -> None:
    with mute_server("127.0.0.1") as port:
        pass
    one = agent(port, 0)
    one.joined = False
    for silent_s, is_lost in ((SILENCE_S - 2, False), (SILENCE_S + 1, True)):
        last = SimpleNamespace(last_seen=time.time() - silent_s)
        assert bool(judge(one, **{one.worker: last})[0]) is is_lost


def test_a_worker_without_heartbeats_whose_host_does_not_answer_gets_no_rank() -> None:
    with mute_server("127.0.0.1") as port:
        pass
    gone = f"tcp://127.0.0.1:{port}"
    with mute_server("127.0.0.1") as port:
        late, fresh = (SimpleNamespace(last_seen=time.time() - s) for s in (60, 0))
        known = {gone: late, f"tcp://127.0.0.1:{port}": late, "tcp://127.0.0.1:1": fresh}

        async def run() -> list[str]:
            return await Silence(SimpleNamespace(workers=known)).gone()

        assert asyncio.run(run()) == [gone]
