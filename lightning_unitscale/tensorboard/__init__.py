"""Write scales for TensorBoard, and serve them to the dashboard.

This file has no imports, because TensorBoard imports it at its start and may have neither torch
nor Lightning.
"""
