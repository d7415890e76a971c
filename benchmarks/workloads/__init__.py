"""The computations: shapes, inputs and sizes, the same for gradserve and its peers."""
