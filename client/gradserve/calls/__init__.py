"""The client without I/O: what to send, and what the answers mean.

Every public call is an `Operation`: a generator that yields the exchanges it needs and returns its result. The sync
and the asyncio client differ only in how they carry the exchanges out.
"""
