"""The boundary around every call: admission, timeouts, errors and statuses."""
