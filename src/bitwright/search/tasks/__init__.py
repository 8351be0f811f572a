"""Tasks, one file each: a module defines TASKS, a tuple of `Task`."""
