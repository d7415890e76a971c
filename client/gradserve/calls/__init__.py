"""The client's calls without I/O: what to send, and how to read the answers.

Every public call is an `Operation`: a generator that yields the exchanges it needs and returns its result. The blocking
and the asyncio client differ only in how they carry out the exchanges.
"""
