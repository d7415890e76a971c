"""The asyncio transport: operations run in the task that awaits them."""
