"""Tasks that run in another thread while the simulation continues."""

import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

Task = Callable[[], None]


@dataclass
class _WriterQueue:
    """The queue and its thread, which do not refer to `Background`, so that it can be garbage-collected."""

    tasks: "queue.Queue[Task | None]"
    done: int = 0
    error: Exception | None = None
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self.work, daemon=True, name="alchemi-writer")
        self.thread.start()

    def work(self) -> None:
        while (task := self.tasks.get()) is not None:
            try:
                if self.error is None:
                    task()
                    self.done += 1
            except Exception as error:
                self.error = error

    def finish(self) -> None:
        self.tasks.put(None)
        self.thread.join()


class Background:
    """A thread that runs tasks one after another, in the order of `put`. At most `waiting` of them are queued.

    After a first error, which is kept, later tasks are dropped. Tasks that are queued when the program ends, or when this
    object is garbage-collected, are still run.
    """

    def __init__(self, waiting: int = 2) -> None:
        self._queue = _WriterQueue(queue.Queue(waiting))
        self._end = weakref.finalize(self, self._queue.finish)

    @property
    def error(self) -> Exception | None:
        """The first error, or None."""
        return self._queue.error

    @property
    def done(self) -> int:
        """Number of tasks that have finished without an error."""
        return self._queue.done

    def put(self, task: Task) -> None:
        """Queue a task. Blocks while the queue is full."""
        self._queue.tasks.put(task)

    def finish(self) -> None:
        """Wait until all tasks are done. No task can be put afterwards."""
        self._end()
