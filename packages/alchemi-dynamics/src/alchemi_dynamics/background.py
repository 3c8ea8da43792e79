"""Jobs that a thread does while the step goes on."""

import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

Job = Callable[[], None]


@dataclass
class _Desk:
    jobs: "queue.Queue[Job | None]"
    done: int = 0
    error: Exception | None = None
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self.work, daemon=True, name="alchemi-writer")
        self.thread.start()

    def work(self) -> None:
        while (job := self.jobs.get()) is not None:
            try:
                if self.error is None:
                    job()
                    self.done += 1
            except Exception as error:
                self.error = error

    def finish(self) -> None:
        self.jobs.put(None)
        self.thread.join()


class Background:
    """A thread that does jobs one after another, in the order they are given; at most `waiting` of them wait.

    The first error is kept, and jobs after it are dropped: nobody waits for a thread that has given up. Jobs that wait when
    the program ends, or when this is forgotten, are still done.
    """

    def __init__(self, waiting: int = 2) -> None:
        self._desk = _Desk(queue.Queue(waiting))
        self._end = weakref.finalize(self, self._desk.finish)

    @property
    def error(self) -> Exception | None:
        """What went wrong so far."""
        return self._desk.error

    @property
    def done(self) -> int:
        """How many jobs have been done."""
        return self._desk.done

    def put(self, job: Job) -> None:
        """Do this next; waits while too many wait already."""
        self._desk.jobs.put(job)

    def finish(self) -> None:
        """Wait until all is done; no more jobs afterwards."""
        self._end()
