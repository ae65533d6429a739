"""Exit statuses of ``mopd-teacher``."""

#: If the engine has crashed or does not stop: a supervisor should restart the teacher.
CRASH_STATUS = 3
#: After Ctrl-C, by the convention of shells.
INTERRUPTED_STATUS = 130
