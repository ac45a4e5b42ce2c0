"""A search by several processes of this machine at a time, each of which does whole trials."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import cast

from fedflat.experiment.campaign.compare import how_many_at_once
from fedflat.experiment.campaign.processes import Process, alone_on_a_core, end_process, start_process
from fedflat.experiment.campaign.tune import Search, Tried, corners, run_search, trials_left


def run_search_side_by_side(
    search: Search, jobs: int | None = None, waiting: Callable[[int], None] = lambda trials: None
) -> Iterator[Tried]:
    """Do the trials that are missing, ``jobs`` or what the file says at a time, and tell of each as it ends.

    What is tried then depends on which trials were over when, so that two such searches differ; with one at a time they do not.
    """
    wanted = jobs or search.file.jobs or len(search.file.devices) or 1
    first = search.config(next(corners(search.space)), search.tune.seeds[0])
    at_once = how_many_at_once([first] * trials_left(search), (), wanted, {})
    if at_once > 1:
        yield from _side_by_side(search, at_once)
    yield from run_search(search, waiting=waiting)  # all, or what a process that was killed has left


def _side_by_side(search: Search, at_once: int) -> Iterator[Tried]:
    devices: list[str | None] = [str(device) for device in search.file.devices] or [None]
    going: dict[Connection, Process] = {}
    try:
        for number in range(at_once):
            one = start_process(_search, search, device=devices[number % len(devices)])
            going[one.pipe] = one
        while going:
            for pipe in cast("list[Connection]", wait(list(going))):
                try:
                    heard = pipe.recv()
                except (EOFError, ConnectionError):
                    end_process(going.pop(pipe))
                    continue
                if isinstance(heard, BaseException):
                    raise heard
                yield heard
    finally:
        for one in going.values():
            end_process(one)


def _search(pipe: Connection, search: Search) -> None:
    alone_on_a_core()
    try:
        for tried in run_search(search):
            pipe.send(tried)
    except (ConnectionError, KeyboardInterrupt):
        return
    except Exception as error:  # a mistake of the user's, or one of ours that is raised again where the search is
        pipe.send(error)
