"""The only place that names a framework. Nothing here is imported until it is asked for."""
