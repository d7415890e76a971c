"""The transport for asyncio: operations run in the task that awaits them."""
