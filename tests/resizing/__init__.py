"""Clusters that change their size: state directories without servers, and servers that hold rounds."""
