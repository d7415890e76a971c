"""`gradserve run`: starts the workers of a training run, and a server for them if there is none.

`command` reads the options, says how other machines join, and runs the whole; `server` is the server that it starts,
with credentials; `processes` has the processes of both: their groups, their output, their end if this process is
killed, and the fleet of workers, which it keeps going. The room imports little, so that workers start soon.
"""
