"""What is computed: shapes, inputs and sizes, the same for gradserve and its peers."""
