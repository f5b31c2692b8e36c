"""What is public about a step or a round, for CSV files, TensorBoard, MLflow and Weights & Biases."""

from bqsgd._src.integrations.loggers import CsvLog, EventLog, MlflowLog, WandbLog

__all__ = ["CsvLog", "EventLog", "MlflowLog", "WandbLog"]
