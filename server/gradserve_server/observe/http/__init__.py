"""The HTTP port: metrics, status and page. Only this package imports aiohttp, and the server imports it late."""
